"""Linear head, log-probabilities and policy gradient: the maths, knowing nothing of patching.

Importing this package imports torch, and Triton only at the first call that uses it.
"""

from __future__ import annotations

from fusepatch.loss.backend import Backend, BackendUnavailableError, choose_backend, unsupported_device
from fusepatch.loss.linear import DEFAULT_CHUNK_MIB, Gradients, Wanted
from fusepatch.loss.log_probabilities import linear_log_probabilities
from fusepatch.loss.logit_map import LogitMap
from fusepatch.loss.policy import Policy, PolicyInputs
from fusepatch.loss.policy_loss import (
    PolicyLoss,
    ReferenceHead,
    linear_policy_loss,
    saved_tensors_are_shared,
    scale_gradients,
)
from fusepatch.loss.separability import PolicyTraits, policy_traits

__all__ = [
    "DEFAULT_CHUNK_MIB",
    "Backend",
    "BackendUnavailableError",
    "Gradients",
    "LogitMap",
    "Policy",
    "PolicyInputs",
    "PolicyLoss",
    "PolicyTraits",
    "ReferenceHead",
    "Wanted",
    "choose_backend",
    "linear_log_probabilities",
    "linear_policy_loss",
    "policy_traits",
    "saved_tensors_are_shared",
    "scale_gradients",
    "unsupported_device",
]
