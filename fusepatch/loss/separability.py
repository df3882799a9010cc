"""What may be assumed about the gradient of a GRPO-family policy loss, as an explicit table.

The statements were found by perturbation against Liger-Kernel's ``ppo_loss_fn`` (0.5.6 to 0.8.5,
``liger_kernel/chunked_loss/grpo_loss.py``). What the table does not list gets no assumption at all.
"""

from __future__ import annotations

from dataclasses import dataclass

# Every term is multiplied by the mask, and by the advantage where beta is 0.
MASKED_TERMS = frozenset({"grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo"})
# The sampling ratio is multiplied by the mask too. VESPO sums the clamped logarithms of all ratios of a sequence.
MASKED_RATIOS = MASKED_TERMS - {"vespo"}
# LUSPO weighs by the length of the sequence and never multiplies by the mask.
KNOWN_TYPES = MASKED_TERMS | {"luspo"}
# At token level, the coefficient of a token depends on that token alone, with old log-probabilities too. VESPO weighs a
# token by the ratio of its whole sequence.
TOKEN_SEPARABLE_WITH_OLD = frozenset({"grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo"})


@dataclass(frozen=True)
class PolicyTraits:
    """What the driver may rely on. The defaults assume nothing, and are right for any policy.

    separable: the coefficient of a row (the derivative of the loss with respect to its log-probability) depends on that
        row's log-probability alone.
    separable_by_sequence: it depends on those of the row's own sequence alone.
    fixed_coefficients: the coefficients do not depend on the log-probabilities at all.
    masked_rows_matter: a row whose mask is 0 may carry gradient or change the loss.
    zero_advantage_rows_matter: a row whose advantage is 0 may carry gradient or change the loss or a metric.
    left_out_ratios_matter: the sampling ratios of rows that are left out change the loss.
    """

    separable: bool = False
    separable_by_sequence: bool = False
    fixed_coefficients: bool = False
    masked_rows_matter: bool = True
    zero_advantage_rows_matter: bool = True
    left_out_ratios_matter: bool = True


def policy_traits(
    loss_type: str,
    importance_sampling_level: str,
    *,
    old_given: bool,
    beta: float,
    bias_correction_kl: bool,
) -> PolicyTraits:
    """Look up the traits of a GRPO-family loss; an unknown loss type or level gets the defaults.

    ``bias_correction_kl`` is Liger's ``use_bias_correction_kl`` (False for releases without it).
    """
    if loss_type not in KNOWN_TYPES or importance_sampling_level not in ("token", "sequence"):
        return PolicyTraits()
    token_level = importance_sampling_level == "token"
    with_kl = beta != 0.0
    if token_level:
        separable = loss_type in TOKEN_SEPARABLE_WITH_OLD or not old_given
    else:
        separable = not old_given and not (with_kl and bias_correction_kl)
    return PolicyTraits(
        separable=separable,
        separable_by_sequence=True,
        fixed_coefficients=not old_given and not with_kl,
        masked_rows_matter=loss_type == "luspo" and (token_level or with_kl),
        zero_advantage_rows_matter=with_kl,
        left_out_ratios_matter=loss_type not in MASKED_RATIOS,
    )
