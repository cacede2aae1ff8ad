"""The data plane: engine, side channel, sender, receiver, manager."""

from sgl_pd_connector.transfer.manager import JaxTransferKVManager
from sgl_pd_connector.transfer.pool import KVRunner, kv_args
from sgl_pd_connector.transfer.receiver import JaxTransferKVReceiver
from sgl_pd_connector.transfer.sender import JaxTransferKVSender
from sgl_pd_connector.transfer.stats import TransferRecord, TransferStats

__all__ = [
    "JaxTransferKVManager",
    "JaxTransferKVReceiver",
    "JaxTransferKVSender",
    "KVRunner",
    "TransferRecord",
    "TransferStats",
    "kv_args",
]
