"""Linear head, log-probabilities and a policy's loss in one go, with every gradient made on the way.

The policy itself is the caller's: a function of log-probabilities [B, T] in plain torch. Only the expensive part, the
head, is computed here. Gradients are made in forward (a sharded head may be gathered only around the forward, as under
ZeRO-3) and only scaled in backward, see :func:`scale_gradients`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from fusepatch.loss.backend import Backend
from fusepatch.loss.chunks import RowPlan, plan_all_rows, plan_rows, ranges, whole_sequences
from fusepatch.loss.gradient_storage import first_columns_pass, group_rows, serves
from fusepatch.loss.linear import (
    Begun,
    CoefficientSource,
    Gradients,
    Head,
    Wanted,
    coefficient_limit,
    grouped_gradient_pass,
    hidden_gradient_pass,
    log_probability_pass,
    make_head,
    scale_hidden_gradient,
    vocabulary_gradient_pass,
)
from fusepatch.loss.logit_map import PLAIN, LogitMap
from fusepatch.loss.rows import HiddenRows
from fusepatch.loss.separability import PolicyTraits

DEFAULT_CHUNK_MIB = 256.0


@dataclass(frozen=True)
class PolicyInputs:
    """What a policy sees: the whole batch, or a run of whole sequences of it.

    ``log_probabilities`` is float32 [B', T]. ``mask`` [B', T] has the caller's dtype, ``advantages`` is [B'],
    ``old_log_probabilities`` and ``reference_log_probabilities`` are float32 [B', T] or None, ``sampling_ratio`` is
    [B', 1] or [B', T] or None. At positions that were not computed the three log-probabilities are 0.
    """

    log_probabilities: torch.Tensor
    mask: torch.Tensor
    advantages: torch.Tensor
    old_log_probabilities: torch.Tensor | None = None
    reference_log_probabilities: torch.Tensor | None = None
    sampling_ratio: torch.Tensor | None = None

    def sequences(self, first: int, last: int) -> PolicyInputs:
        """The same for sequences [first, last)."""

        def cut(values: torch.Tensor | None) -> torch.Tensor | None:
            return None if values is None else values[first:last]

        return PolicyInputs(
            self.log_probabilities[first:last],
            self.mask[first:last],
            self.advantages[first:last],
            cut(self.old_log_probabilities),
            cut(self.reference_log_probabilities),
            cut(self.sampling_ratio),
        )


# Returns the loss (0-dim) and the metrics. For a run of sequences the loss is that run's share of the whole batch's loss:
# normalise by the whole batch's mask, not by ``inputs.mask``.
Policy = Callable[[PolicyInputs], "tuple[torch.Tensor, Sequence[torch.Tensor]]"]


@dataclass(frozen=True)
class ReferenceHead:
    """Hidden states [B, T, H'] and head of a reference model whose log-probabilities are computed here.

    ``weight`` is [V', H'], ``bias`` [V'] or None.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None = None


@dataclass(frozen=True)
class PolicyLoss:
    """Result of :func:`linear_policy_loss`; nothing in it carries a graph.

    ``loss`` is float32 0-dim; ``metrics`` as the policy made them; ``gradients`` of the loss, None where not wanted, each with
    the shape and dtype of its input; ``log_probabilities`` float32 [B, T], 0 where not computed; ``rows`` is the number
    of rows that were computed; ``backend`` says what ran and why.
    """

    loss: torch.Tensor
    metrics: tuple[torch.Tensor, ...]
    gradients: Gradients
    log_probabilities: torch.Tensor
    rows: int
    backend: Backend


def linear_policy_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    mask: torch.Tensor,
    advantages: torch.Tensor,
    policy: Policy,
    traits: PolicyTraits,
    wanted: Wanted,
    *,
    bias: torch.Tensor | None = None,
    old_log_probabilities: torch.Tensor | None = None,
    reference_log_probabilities: torch.Tensor | None = None,
    reference_head: ReferenceHead | None = None,
    sampling_ratio: torch.Tensor | None = None,
    logit_map: LogitMap = PLAIN,
    prefer: str = "speed",
    chunk_mib: float = DEFAULT_CHUNK_MIB,
    backend: str = "auto",
) -> PolicyLoss:
    """Compute a policy's loss over the log-probabilities of ``targets``, and the gradients that are wanted.

    Call it where grad mode is off, as inside ``torch.autograd.Function.forward``. No argument is modified. One host sync
    per call for the number of rows that enter (none where every row must), one more where parameter gradients come after
    the policy, to leave out rows whose coefficient turned out to be zero. How often the policy is called:

    - no gradient wanted: once, without grad mode;
    - only grad-hidden wanted (a frozen head): once, after all log-probabilities. Two matrix products in all, whatever the
      policy, since a row's coefficient may be applied after them;
    - grad-weight or grad-bias wanted: with fixed coefficients twice; with a policy that is separable, by rows or by
      sequences, once per group of rows and once at the end; else once. Three products where all rows fit one group, or a
      separable policy's rows or sequences do; four where not.

    The number of calls can differ between ranks only in the separable cases: a collective inside the policy
    has to be made once by the caller and its result kept.

    Args:
        hidden: [B, T, H], any strides.
        weight: [V, H]. A dtype that differs from the one of the matrix products costs a copy.
        targets: integers [B, T]. Outside [0, V) a target counts as one whose logit is 0.
        mask: [B, T], any dtype; rows where it is 0 are not computed unless ``traits.masked_rows_matter``. What hidden,
            the old and the reference log-probabilities hold there does not matter, NaN included.
        advantages: [B].
        wanted: which gradients to make; ``Wanted(False, False, False)`` where autograd will not ask for any
            (``len(ctx.next_functions) == 0``).
        bias: [V].
        old_log_probabilities, reference_log_probabilities: [B, T].
        reference_head: computes the reference log-probabilities with the same logit map; not together with
            ``reference_log_probabilities``.
        sampling_ratio: [B, 1] or [B, T].
        prefer: ``"memory"`` makes grad-weight in no more memory than its own, without a float32 sum of its size, at the
            price of about half of one more matrix product (a whole one where no policy gradient is known in the first pass). Nothing changes where neither weight nor bias needs a gradient.
        chunk_mib: MiB for the logits of one chunk; the chunk is the largest multiple of 128 rows within it.
        backend: ``"auto"``, ``"triton"`` or ``"torch"``, see :func:`fusepatch.loss.backend.choose_backend`.

    Raises:
        ValueError: a shape does not fit, or ``prefer`` is neither ``"speed"`` nor ``"memory"``.
        BackendUnavailableError: ``backend="triton"`` where Triton cannot run.
    """
    _check_shapes(hidden, weight, targets, mask, advantages, bias)
    if prefer not in ("speed", "memory"):
        raise ValueError(f"prefer must be 'speed' or 'memory', found {prefer!r}")
    if reference_head is not None and reference_log_probabilities is not None:
        raise ValueError("Pass reference_log_probabilities or reference_head, not both")
    head = make_head(hidden, weight, bias, logit_map, backend, chunk_mib)
    plan = _plan(mask, advantages, traits)
    rows = HiddenRows(hidden.detach(), plan, head.precision)
    row_targets = plan.take(targets).to(torch.int64)
    if reference_head is not None:
        reference_log_probabilities = _reference(reference_head, plan, row_targets, logit_map, backend, chunk_mib)
    inputs = _sanitised(plan, mask, advantages, old_log_probabilities, reference_log_probabilities, sampling_ratio)
    call = _Call(head, rows, row_targets, inputs, policy, traits)
    if not wanted.any:
        result = _evaluate(call)
    elif not wanted.parameters:
        result = _hidden_only(call)
    elif prefer == "memory":
        result = _saving_memory(call, wanted)
    elif traits.fixed_coefficients:
        result = _fixed(call, wanted)
    elif plan.rows <= head.group_rows:
        result = _one_group(call, wanted)
    else:
        result = _by_groups(call, wanted)
    if mask.numel() == 0:
        # Some loss types divide by the number of sequences; the sum over nothing is nothing.
        result = replace(result, loss=torch.zeros_like(result.loss))
    return result


def scale_gradients(gradients: Sequence[torch.Tensor | None], grad_output: torch.Tensor) -> list[torch.Tensor | None]:
    """Multiply saved gradients by the 0-dim ``grad_output``, for use in ``torch.autograd.Function.backward``.

    In place only where autograd will free the graph and does not record; a second backward through a kept graph finds
    the saved tensors as they were. Nothing is compared, so the device is not synced.
    """
    in_place = not torch.is_grad_enabled() and not _graph_is_kept()
    if in_place:
        return [None if gradient is None else gradient.mul_(grad_output) for gradient in gradients]
    return [None if gradient is None else gradient * grad_output for gradient in gradients]


def _graph_is_kept() -> bool:
    # Private to torch; where it is absent, assume that the graph is kept.
    keeps = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if keeps is None else bool(keeps())


@dataclass(frozen=True)
class _Call:
    head: Head
    rows: HiddenRows
    targets: torch.Tensor
    inputs: PolicyInputs
    policy: Policy
    traits: PolicyTraits

    @property
    def plan(self) -> RowPlan:
        return self.rows.plan

    def with_values(self, values: torch.Tensor) -> PolicyInputs:
        return replace(self.inputs, log_probabilities=self.plan.put(values.to(torch.float32)))


NOTHING = Gradients(None, None, None)


def _check_shapes(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    mask: torch.Tensor,
    advantages: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:
    if hidden.dim() != 3:
        raise ValueError(f"hidden must be [B, T, H], found shape {tuple(hidden.shape)}")
    batch, length, width = hidden.shape
    wanted = {
        "weight": (weight, (weight.shape[0], width)),
        "targets": (targets, (batch, length)),
        "mask": (mask, (batch, length)),
        "advantages": (advantages, (batch,)),
    }
    if bias is not None:
        wanted["bias"] = (bias, (weight.shape[0],))
    for name, (tensor, shape) in wanted.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name} must have shape {shape} with hidden of shape {tuple(hidden.shape)}, found {tuple(tensor.shape)}"
            )


def _plan(mask: torch.Tensor, advantages: torch.Tensor, traits: PolicyTraits) -> RowPlan:
    keep = None
    if not traits.masked_rows_matter:
        keep = mask != 0
    if not traits.zero_advantage_rows_matter:
        carrying = (advantages != 0).unsqueeze(1)
        keep = carrying.expand(mask.shape) if keep is None else keep & carrying
    if keep is None or mask.numel() == 0:
        return plan_all_rows((mask.shape[0], mask.shape[1]))
    return plan_rows(keep)


def _reference(
    reference: ReferenceHead,
    plan: RowPlan,
    targets: torch.Tensor,
    logit_map: LogitMap,
    backend: str,
    chunk_mib: float,
) -> torch.Tensor:
    head = make_head(reference.hidden, reference.weight, reference.bias, logit_map, backend, chunk_mib)
    rows = HiddenRows(reference.hidden.detach(), plan, head.precision)
    return plan.put(log_probability_pass(head, rows, targets).values)


def _sanitised(
    plan: RowPlan,
    mask: torch.Tensor,
    advantages: torch.Tensor,
    old: torch.Tensor | None,
    reference: torch.Tensor | None,
    ratio: torch.Tensor | None,
) -> PolicyInputs:
    # Selected, never multiplied: 0 * inf is NaN, and padding may hold anything.
    def clean(values: torch.Tensor | None) -> torch.Tensor | None:
        if values is None:
            return None
        values = values.detach().to(torch.float32)
        return values if plan.computed is None else torch.where(plan.computed, values, 0.0)

    if ratio is not None:
        ratio = ratio.detach()
        if plan.computed is not None and ratio.shape == plan.computed.shape:
            # VESPO sums the logarithms of all ratios, masked ones too, so finite values stay.
            ratio = torch.where(plan.computed | ratio.isfinite(), ratio, 1.0)
    return PolicyInputs(
        torch.zeros(plan.shape, dtype=torch.float32, device=mask.device),
        mask,
        advantages.detach(),
        clean(old),
        clean(reference),
        ratio,
    )


def _loss(policy: Policy, inputs: PolicyInputs) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    with torch.no_grad():
        loss, metrics = policy(inputs)
    return loss.detach(), tuple(metric.detach() for metric in metrics)


def _loss_and_coefficients(
    policy: Policy, inputs: PolicyInputs
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor]:
    with torch.enable_grad():
        leaf = inputs.log_probabilities.detach().requires_grad_()
        loss, metrics = policy(replace(inputs, log_probabilities=leaf))
        coefficients = None
        if loss.requires_grad:
            (coefficients,) = torch.autograd.grad(loss, leaf, allow_unused=True)
    if coefficients is None:
        coefficients = torch.zeros_like(leaf)
    return loss.detach(), tuple(metric.detach() for metric in metrics), coefficients.detach()


def _result(
    call: _Call,
    inputs: PolicyInputs,
    loss: torch.Tensor,
    metrics: tuple[torch.Tensor, ...],
    gradients: Gradients,
) -> PolicyLoss:
    return PolicyLoss(loss, metrics, gradients, inputs.log_probabilities.detach(), call.plan.rows, call.head.backend)


def _evaluate(call: _Call) -> PolicyLoss:
    inputs = call.with_values(log_probability_pass(call.head, call.rows, call.targets).values)
    return _result(call, inputs, *_loss(call.policy, inputs), NOTHING)


def _hidden_only(call: _Call) -> PolicyLoss:
    done = hidden_gradient_pass(call.head, call.rows, call.targets)
    inputs = call.with_values(done.log_probabilities.values)
    # After the products were queued, so that the policy's many small launches run ahead of them.
    loss, metrics, coefficients = _loss_and_coefficients(call.policy, inputs)
    scale = coefficients * call.plan.put(done.multiplier)
    grad_hidden = scale_hidden_gradient(call.head, done.grad_hidden, scale)
    return _result(call, inputs, loss, metrics, Gradients(grad_hidden, None, None))


def _fixed(call: _Call, wanted: Wanted) -> PolicyLoss:
    source = _fixed_coefficients(call)
    limit = None
    if call.head.precision.narrow_range:
        limit = coefficient_limit(call.head, source(call.targets, 0, call.plan.rows))
    groups = call.head.groups(call.plan.rows)
    values, gradients = grouped_gradient_pass(call.head, call.rows, call.targets, wanted, source, groups, limit)
    inputs = call.with_values(values)
    return _result(call, inputs, *_loss(call.policy, inputs), gradients)


def _fixed_coefficients(call: _Call) -> CoefficientSource:
    known: list[torch.Tensor] = []

    def source(values: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        if not known:
            # At the first group and not before it, so that the launches run ahead of that group's products.
            known.append(call.plan.take(_loss_and_coefficients(call.policy, call.inputs)[2]))
        return known[0][start:stop]

    return source


def _one_group(call: _Call, wanted: Wanted) -> PolicyLoss:
    found: list[tuple[torch.Tensor, tuple[torch.Tensor, ...]]] = []

    def source(values: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        loss, metrics, coefficients = _loss_and_coefficients(call.policy, call.with_values(values))
        found.append((loss, metrics))
        return call.plan.take(coefficients)

    groups = call.head.groups(call.plan.rows)
    values, gradients = grouped_gradient_pass(call.head, call.rows, call.targets, wanted, source, groups)
    inputs = call.with_values(values)
    loss, metrics = found[0] if found else _loss(call.policy, inputs)
    return _result(call, inputs, loss, metrics, gradients)


def _by_groups(call: _Call, wanted: Wanted) -> PolicyLoss:
    groups = _groups(call, call.head.group_rows)
    if not groups:
        return _by_vocabulary(call, wanted)
    source = _separable_coefficients(call)
    values, gradients = grouped_gradient_pass(call.head, call.rows, call.targets, wanted, source, groups)
    inputs = call.with_values(values)
    return _result(call, inputs, *_loss(call.policy, inputs), gradients)


def _groups(call: _Call, limit: int) -> list[tuple[int, int]] | None:
    """Groups of at most ``limit`` rows whose coefficients are known with the group; None where there are none such."""
    if call.head.precision.narrow_range:
        return None
    if call.traits.separable or call.traits.fixed_coefficients:
        return ranges(0, call.plan.rows, limit, call.head.chunk_rows)
    return whole_sequences(call.plan.counts, limit) if call.traits.separable_by_sequence else None


def _separable_coefficients(call: _Call) -> CoefficientSource:
    length = call.plan.shape[1]

    def source(values: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        first, last = call.plan.sequences(start, stop)
        positions = call.plan.positions(start, stop, values.device) - first * length
        inside = torch.zeros((last - first) * length, dtype=torch.bool, device=values.device)
        inside = inside.index_fill_(0, positions, True).view(last - first, length)
        own = torch.zeros((last - first) * length, dtype=torch.float32, device=values.device)
        own = own.index_copy_(0, positions, values[start:stop].to(torch.float32)).view(last - first, length)
        inputs = call.inputs.sequences(first, last)

        def clean(given: torch.Tensor | None) -> torch.Tensor | None:
            return None if given is None else torch.where(inside, given, 0.0)

        inputs = replace(
            inputs,
            log_probabilities=own,
            old_log_probabilities=clean(inputs.old_log_probabilities),
            reference_log_probabilities=clean(inputs.reference_log_probabilities),
        )
        return _loss_and_coefficients(call.policy, inputs)[2].reshape(-1).index_select(0, positions)

    return source


def _by_vocabulary(call: _Call, wanted: Wanted) -> PolicyLoss:
    """All log-probabilities (with grad-hidden on the way), the policy, then the parameters' gradients."""
    done = None
    if wanted.hidden:
        done = hidden_gradient_pass(call.head, call.rows, call.targets)
        found = done.log_probabilities
    else:
        found = log_probability_pass(call.head, call.rows, call.targets)
    inputs = call.with_values(found.values)
    loss, metrics, coefficients = _loss_and_coefficients(call.policy, inputs)
    if done is not None:
        scale_hidden_gradient(call.head, done.grad_hidden, coefficients * call.plan.put(done.multiplier))
    gradients = _by_slices(call, wanted, found.log_sum_exp, coefficients)
    grad_hidden = done.grad_hidden if done is not None else None
    return _result(call, inputs, loss, metrics, replace(gradients, hidden=grad_hidden))


def _saving_memory(call: _Call, wanted: Wanted) -> PolicyLoss:
    """As many of grad-weight's rows as its own memory has room to sum in the first pass, the others after it."""
    groups = _groups(call, group_rows(call.head)) or _groups(call, max(call.plan.counts, default=0))
    if not groups or not wanted.weight or not serves(call.head, groups):
        return _by_vocabulary(call, wanted)
    source = _fixed_coefficients(call) if call.traits.fixed_coefficients else _separable_coefficients(call)
    part = first_columns_pass(call.head, call.rows, call.targets, wanted, source, groups)
    inputs = call.with_values(part.log_probabilities.values)
    loss, metrics = _loss(call.policy, inputs)
    coefficients = call.plan.put(part.coefficients)
    gradients = _by_slices(call, wanted, part.log_probabilities.log_sum_exp, coefficients, part.begun)
    return _result(call, inputs, loss, metrics, replace(gradients, hidden=part.grad_hidden))


def _by_slices(
    call: _Call, wanted: Wanted, log_sum_exp: torch.Tensor, coefficients: torch.Tensor, begun: Begun | None = None
) -> Gradients:
    left = call.plan
    if not call.traits.fixed_coefficients and coefficients.numel():
        # Clipped tokens: the second sync costs less than their products.
        keep = coefficients != 0
        left = plan_rows(keep if left.computed is None else keep & left.computed)
    return vocabulary_gradient_pass(
        call.head,
        replace(call.rows, plan=left),
        left.take(call.plan.put(call.targets)),
        wanted,
        left.take(call.plan.put(log_sum_exp)),
        left.take(coefficients),
        begun,
    )
