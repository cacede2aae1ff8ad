"""Defects of sgl-jax 0.1.0rc0 that end or corrupt a server when requests of different kinds share a batch.

A plain server has them too. Behind a router such batches are the rule, and a prefill or decode server must survive
them, so they are corrected in its scheduler process; a server without disaggregation is left as it is. Each of these
becomes unnecessary when upstream fixes what it describes.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def install() -> None:
    """Corrects what can be corrected once, in this process."""
    _allow_unconstrained_rows()
    _keep_logprob_lists_in_step()


def uniform_logprobs(req: Any) -> None:
    """Lets a request for logprobs of the output share a batch with one that wants none.

    sgl-jax computes nothing for ``return_output_logprob_only`` unless all requests of a batch have it, reads the result
    all the same, and dies. Asking for the prompt's last logprob as well gives the client the same answer.
    """
    if req.return_output_logprob_only:
        req.return_logprob, req.return_output_logprob_only = True, False


def _allow_unconstrained_rows() -> None:
    """Batches in which only some requests are constrained by a grammar.

    sgl-jax makes the batch's mask of allowed tokens from zeros, and fills the rows that have a grammar: every other
    request may sample nothing, and gets NaN.
    """
    from sgl_jax.srt.constrained.llguidance_backend import GuidanceGrammar

    original = GuidanceGrammar.allocate_vocab_mask

    def allocate_vocab_mask(self: Any, vocab_size: int, batch_size: int) -> np.ndarray:
        mask: np.ndarray = original(self, vocab_size, batch_size)
        mask.fill(-1)
        return mask

    GuidanceGrammar.allocate_vocab_mask = allocate_vocab_mask


def _keep_logprob_lists_in_step() -> None:
    """Batches that a request for logprobs has left.

    sgl-jax keeps a batch's ``top_logprobs_nums`` then, but no longer extends it when further requests join; the next
    time one leaves, it indexes past the end and dies.
    """
    from sgl_jax.srt.managers.schedule_batch import ScheduleBatch

    original = ScheduleBatch.filter_batch

    def filter_batch(self: Any, *args: Any, **kwargs: Any) -> None:
        for info in self.reqs_info:
            if info.reqs and info.top_logprobs_nums is not None:
                info.top_logprobs_nums = [req.top_logprobs_num for req in info.reqs]
                info.token_ids_logprobs = [req.token_ids_logprob for req in info.reqs]
        original(self, *args, **kwargs)

    ScheduleBatch.filter_batch = filter_batch
