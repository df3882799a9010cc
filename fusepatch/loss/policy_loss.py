"""Linear head, log-probabilities and a policy's loss in one go, with every gradient made on the way.

The policy itself is the caller's: a function of log-probabilities [B, T] in plain torch. Only the expensive part, the
head, is computed here. Gradients are made in forward (a sharded head may be gathered only around the forward, as under
ZeRO-3) and only scaled in backward, see :func:`scale_gradients`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from fusepatch.loss.arguments import check_head, check_targets, check_tensor
from fusepatch.loss.backend import Backend
from fusepatch.loss.chunks import RowPlan, ranges, whole_sequences
from fusepatch.loss.gradient_storage import first_columns_pass, group_rows, serves
from fusepatch.loss.left_out_rows import (
    fixed_coefficients_of,
    neutral_log_probabilities,
    neutral_ratio,
    rows_that_count,
    rows_with_gradient,
)
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
        targets: int64 or int32 [B, T]. Outside [0, V) a target counts as one whose logit is 0.
        mask: [B, T], any dtype. Which rows are left out by it and by the advantages, and what becomes of NaN and infinity, is
            the rule of :mod:`fusepatch.loss.left_out_rows`.
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
        ValueError: a shape, a device or the dtype of the targets does not fit, or ``prefer`` is neither ``"speed"`` nor ``"memory"``.
        BackendUnavailableError: ``backend="triton"`` where Triton cannot run.
    """
    tokens = tuple(hidden.shape[:2])
    check_head(hidden, weight, bias)
    check_targets(targets, tokens, hidden.device)
    check_tensor("mask", mask, hidden.device, tokens)
    check_tensor("advantages", advantages, hidden.device, tokens[:1])
    check_tensor("old_log_probabilities", old_log_probabilities, hidden.device, tokens)
    check_tensor("reference_log_probabilities", reference_log_probabilities, hidden.device, tokens)
    check_tensor("sampling_ratio", sampling_ratio, hidden.device, tokens, (tokens[0], 1))
    if prefer not in ("speed", "memory"):
        raise ValueError(f"prefer must be 'speed' or 'memory', found {prefer!r}")
    if reference_head is not None and reference_log_probabilities is not None:
        raise ValueError("Pass reference_log_probabilities or reference_head, not both")
    if reference_head is not None:
        check_head(reference_head.hidden, reference_head.weight, reference_head.bias, "reference_head.")
        wanted_shape = (*tokens, reference_head.hidden.shape[2])
        check_tensor("reference_head.hidden", reference_head.hidden, hidden.device, wanted_shape)
    head = make_head(hidden, weight, bias, logit_map, backend, chunk_mib)
    plan = rows_that_count(mask, advantages, traits)
    rows = HiddenRows(hidden.detach(), plan, head.precision)
    row_targets = plan.take(targets).to(torch.int64)
    if reference_head is not None:
        reference_log_probabilities = _reference(reference_head, plan, row_targets, logit_map, backend, chunk_mib)
    inputs = PolicyInputs(
        torch.zeros(plan.shape, dtype=torch.float32, device=mask.device),
        mask,
        advantages.detach(),
        neutral_log_probabilities(plan, old_log_probabilities),
        neutral_log_probabilities(plan, reference_log_probabilities),
        neutral_ratio(plan, sampling_ratio, traits),
    )
    call = _Call(head, rows, row_targets, inputs, policy, traits)
    if not wanted.any:
        return _evaluate(call)
    if not wanted.parameters:
        return _hidden_only(call)
    if prefer == "memory":
        return _saving_memory(call, wanted)
    if traits.fixed_coefficients:
        return _fixed(call, wanted)
    if plan.rows <= head.group_rows:
        return _one_group(call, wanted)
    return _by_groups(call, wanted)


def scale_gradients(
    gradients: Sequence[torch.Tensor | None], grad_output: torch.Tensor, *, shared: bool
) -> list[torch.Tensor | None]:
    """Multiply saved gradients by the 0-dim ``grad_output``, for use in ``torch.autograd.Function.backward``.

    In place only where nobody else can hold them, autograd will free the graph and does not record; a second backward
    through a kept graph finds the saved tensors as they were. Nothing is compared, so the device is not synced.

    Args:
        shared: whether the saved tensors may be somebody else's too: what :func:`saved_tensors_are_shared` said when
            they were saved, True where it was not asked.
    """
    in_place = not shared and not torch.is_grad_enabled() and not _graph_is_kept()
    if in_place:
        return [None if gradient is None else gradient.mul_(grad_output) for gradient in gradients]
    return [None if gradient is None else gradient * grad_output for gradient in gradients]


def saved_tensors_are_shared() -> bool:
    """Whether saved-tensor hooks (an offload, a log, a checkpoint) are set, which may keep what autograd saves now."""
    # Private to torch; where it is absent, assume that there are hooks.
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is None or top(False) is not None


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
    known = _without_log_probabilities(call)
    limit = coefficient_limit(call.head, known()) if call.head.precision.narrow_range else None
    source = _fixed_coefficients(known)
    groups = call.head.groups(call.plan.rows)
    values, gradients = grouped_gradient_pass(call.head, call.rows, call.targets, wanted, source, groups, limit)
    inputs = call.with_values(values)
    return _result(call, inputs, *_loss(call.policy, inputs), gradients)


def _without_log_probabilities(call: _Call) -> Callable[[], torch.Tensor]:
    """Gives the coefficients [R] of a policy for which the log-probabilities do not matter; found when first asked for."""
    found: list[torch.Tensor] = []

    def coefficients() -> torch.Tensor:
        if not found:
            found.append(call.plan.take(_loss_and_coefficients(call.policy, call.inputs)[2]))
        return found[0]

    return coefficients


def _fixed_coefficients(known: Callable[[], torch.Tensor]) -> CoefficientSource:
    def source(values: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        # Asked for at the first group and not before it, so that the launches run ahead of that group's products.
        return fixed_coefficients_of(known()[start:stop], values[start:stop])

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
    gradients = _by_slices(call, wanted, inputs, found.log_sum_exp, coefficients)
    grad_hidden = done.grad_hidden if done is not None else None
    return _result(call, inputs, loss, metrics, replace(gradients, hidden=grad_hidden))


def _saving_memory(call: _Call, wanted: Wanted) -> PolicyLoss:
    """As many of grad-weight's rows as its own memory has room to sum in the first pass, the others after it."""
    groups = _groups(call, group_rows(call.head)) or _groups(call, max(call.plan.counts, default=0))
    if not groups or not wanted.weight or not serves(call.head, groups):
        return _by_vocabulary(call, wanted)
    if call.traits.fixed_coefficients:
        source = _fixed_coefficients(_without_log_probabilities(call))
    else:
        source = _separable_coefficients(call)
    part = first_columns_pass(call.head, call.rows, call.targets, wanted, source, groups)
    inputs = call.with_values(part.log_probabilities.values)
    loss, metrics = _loss(call.policy, inputs)
    coefficients = call.plan.put(part.coefficients)
    gradients = _by_slices(call, wanted, inputs, part.log_probabilities.log_sum_exp, coefficients, part.begun)
    return _result(call, inputs, loss, metrics, replace(gradients, hidden=part.grad_hidden))


def _by_slices(
    call: _Call,
    wanted: Wanted,
    inputs: PolicyInputs,
    log_sum_exp: torch.Tensor,
    coefficients: torch.Tensor,
    begun: Begun | None = None,
) -> Gradients:
    left = call.plan
    if not call.traits.fixed_coefficients and coefficients.numel():
        # Clipped tokens: the second sync costs less than their products.
        left = rows_with_gradient(call.plan, coefficients, inputs.log_probabilities)
    return vocabulary_gradient_pass(
        call.head,
        replace(call.rows, plan=left),
        left.take(call.plan.put(call.targets)),
        wanted,
        left.take(call.plan.put(log_sum_exp)),
        left.take(coefficients),
        begun,
    )
