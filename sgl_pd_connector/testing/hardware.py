"""What this machine has, found without claiming it."""

from __future__ import annotations

import os


def tpu_chips() -> list[int]:
    """Numbers of the TPU chips that a process may use here. Does not load libtpu, which would claim them."""
    from jax._src import hardware_utils

    visible = os.environ.get("TPU_VISIBLE_CHIPS")
    if visible:
        return [int(chip) for chip in visible.split(",")]
    count, _ = hardware_utils.num_available_tpu_chips_and_device_id()
    return list(range(count))
