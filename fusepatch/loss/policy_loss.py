"""Linear head, log-probabilities and a policy's loss in one go, with every gradient made on the way.

The policy itself is the caller's: a function of log-probabilities [B, T] in plain torch. Only the expensive part, the
head, is computed here. Gradients are made in forward (a sharded head may be gathered only around the forward, as under
ZeRO-3) and only scaled in backward, see :func:`scale_gradients`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fusepatch.loss import coefficients, linear
from fusepatch.loss.arguments import check_head, check_targets, check_tensor
from fusepatch.loss.backend import Backend
from fusepatch.loss.coefficients import Coefficients, separable_groups
from fusepatch.loss.gradient_storage import first_columns_pass, group_rows, serves
from fusepatch.loss.left_out_rows import policy_inputs, rows_that_count, rows_with_gradient
from fusepatch.loss.linear import DEFAULT_CHUNK_MIB, Begun, Gradients, Wanted
from fusepatch.loss.logit_map import PLAIN, LogitMap
from fusepatch.loss.policy import LossAndMetrics, Policy, PolicyCall, PolicyInputs
from fusepatch.loss.rows import Rows
from fusepatch.loss.separability import PolicyTraits


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

    ``loss`` is float32 0-dim; ``metrics`` as the policy made them; ``gradients`` of the loss, None where not wanted,
    each with the shape and dtype of its input; ``log_probabilities`` float32 [B, T], 0 where not computed; ``rows`` is
    the number of rows that were computed; ``backend`` says what ran and why.
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

    Call it where grad mode is off, as inside ``torch.autograd.Function.forward``. No argument is modified. One host
    sync per call for the number of rows that enter (none where every row must), one more where parameter gradients come
    after the policy, to leave out rows whose coefficient turned out to be zero. How often the policy is called:

    - no gradient wanted: once, without grad mode;
    - only grad-hidden wanted (a frozen head): once, after all log-probabilities. Two matrix products in all, whatever
      the policy, since a row's coefficient may be applied after them;
    - grad-weight or grad-bias wanted: with fixed coefficients twice; with a policy that is separable, by rows or by
      sequences, once per group of rows and once at the end; else once. Three products where all rows fit one group, or
      a separable policy's rows or sequences do; four where not.

    The number of calls can differ between ranks only in the separable cases: a collective inside the policy
    has to be made once by the caller and its result kept.

    Args:
        hidden: [B, T, H], any strides.
        weight: [V, H]. A dtype that differs from the one of the matrix products costs a copy.
        targets: int64 or int32 [B, T]. Outside [0, V) a target counts as one whose logit is 0.
        mask: [B, T], any dtype. Which rows are left out by it and by the advantages, and what becomes of NaN and
            infinity, is the rule of :mod:`fusepatch.loss.left_out_rows`.
        advantages: [B].
        wanted: which gradients to make; ``Wanted(False, False, False)`` where autograd will not ask for any
            (``len(ctx.next_functions) == 0``).
        bias: [V].
        old_log_probabilities, reference_log_probabilities: [B, T].
        reference_head: computes the reference log-probabilities with the same logit map; not together with
            ``reference_log_probabilities``.
        sampling_ratio: [B, 1] or [B, T].
        prefer: ``"memory"`` makes grad-weight in no more memory than its own, without a float32 sum of its size, at the
            price of about half of one more matrix product (a whole one where no policy gradient is known in the first
            pass). Nothing changes where neither weight nor bias needs a gradient.
        chunk_mib: MiB for the logits of one chunk; the chunk is the largest multiple of 128 rows within it.
        backend: ``"auto"``, ``"triton"`` or ``"torch"``, see :func:`fusepatch.loss.backend.choose_backend`.

    Raises:
        ValueError: a shape, a device or the dtype of the targets does not fit, or ``prefer`` is neither ``"speed"`` nor
            ``"memory"``.
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
        raise ValueError(
            "reference_log_probabilities and reference_head were both given, and one comes from the other: pass one"
        )
    if reference_head is not None:
        check_head(reference_head.hidden, reference_head.weight, reference_head.bias, "reference_head.")
        wanted_shape = (*tokens, reference_head.hidden.shape[2])
        check_tensor("reference_head.hidden", reference_head.hidden, hidden.device, wanted_shape)
    head = linear.make_head(hidden, weight, bias, logit_map, backend, chunk_mib)
    plan = rows_that_count(mask, advantages, traits)
    rows = Rows(hidden.detach(), plan.take(targets).to(torch.int64), plan, head.precision)
    reference = reference_log_probabilities
    if reference_head is not None:
        reference = _log_probabilities_of(reference_head, rows, logit_map, backend, chunk_mib)
    inputs = policy_inputs(plan, traits, mask, advantages, old_log_probabilities, reference, sampling_ratio)
    call = PolicyCall(head, rows, inputs, policy, traits)
    if not wanted.any:
        return _evaluate(call)
    if not wanted.parameters:
        return _hidden_only(call)
    if prefer == "memory":
        first = _first_columns(call, wanted) or _log_probabilities_first(call, wanted.hidden)
        return _by_vocabulary(call, wanted, first)
    if traits.fixed_coefficients:
        return _grouped(call, wanted, coefficients.fixed(call), head.groups(plan.rows))
    if plan.rows <= head.group_rows:
        return _grouped(call, wanted, coefficients.of_whole_batch(call), head.groups(plan.rows))
    groups = separable_groups(call, head.group_rows)
    if groups:
        return _grouped(call, wanted, coefficients.of_each_group(call), groups)
    return _by_vocabulary(call, wanted, _log_probabilities_first(call, wanted.hidden))


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


def _log_probabilities_of(
    reference: ReferenceHead, rows: Rows, logit_map: LogitMap, backend: str, chunk_mib: float
) -> torch.Tensor:
    head = linear.make_head(reference.hidden, reference.weight, reference.bias, logit_map, backend, chunk_mib)
    rows = replace(rows, hidden=reference.hidden.detach(), precision=head.precision)
    return rows.plan.put(linear.log_probability_pass(head, rows).values)


def _result(call: PolicyCall, inputs: PolicyInputs, loss: LossAndMetrics, gradients: Gradients) -> PolicyLoss:
    return PolicyLoss(*loss, gradients, inputs.log_probabilities.detach(), call.plan.rows, call.head.backend)


def _evaluate(call: PolicyCall) -> PolicyLoss:
    inputs = call.inputs_with(linear.log_probability_pass(call.head, call.rows).values)
    return _result(call, inputs, call.loss(inputs), Gradients(None, None, None))


def _hidden_only(call: PolicyCall) -> PolicyLoss:
    first = _log_probabilities_first(call, True)
    return _result(call, first.inputs, first.loss, Gradients(first.grad_hidden, None, None))


def _grouped(call: PolicyCall, wanted: Wanted, source: Coefficients, groups: list[tuple[int, int]]) -> PolicyLoss:
    """Every gradient in one pass, given where the coefficients of each group come from."""
    values, gradients = linear.grouped_gradient_pass(call.head, call.rows, wanted, source.of_rows, groups, source.limit)
    inputs = call.inputs_with(values)
    return _result(call, inputs, source.loss(inputs), gradients)


@dataclass(frozen=True)
class _First:
    """What is known after a first pass: ``log_sum_exp`` [R] and ``coefficients`` [B, T] of every row, grad-hidden if it
    is wanted, and what has been made of the parameters' gradients.
    """

    inputs: PolicyInputs
    loss: LossAndMetrics
    log_sum_exp: torch.Tensor
    coefficients: torch.Tensor
    grad_hidden: torch.Tensor | None
    begun: Begun | None = None


def _by_vocabulary(call: PolicyCall, wanted: Wanted, first: _First) -> PolicyLoss:
    """The parameters' gradients by slices of the vocabulary, given what the first pass has begun."""
    plan = call.plan
    left = rows_with_gradient(plan, call.traits, first.coefficients, first.inputs.log_probabilities)
    gradients = linear.vocabulary_gradient_pass(
        call.head,
        call.rows.only(left),
        wanted,
        left.take(plan.put(first.log_sum_exp)),
        left.take(first.coefficients),
        first.begun,
    )
    return _result(call, first.inputs, first.loss, replace(gradients, hidden=first.grad_hidden))


def _log_probabilities_first(call: PolicyCall, hidden: bool) -> _First:
    """All log-probabilities, with grad-hidden on the way where it is wanted, then the policy."""
    if not hidden:
        found = linear.log_probability_pass(call.head, call.rows)
        inputs = call.inputs_with(found.values)
        loss, coefficients = call.loss_and_coefficients(inputs)
        return _First(inputs, loss, found.log_sum_exp, coefficients, None)
    outputs, grad_hidden = linear.hidden_gradient_pass(call.head, call.rows)
    inputs = call.inputs_with(outputs.values)
    # After the products were queued, so that the policy's many small launches run ahead of them.
    loss, coefficients = call.loss_and_coefficients(inputs)
    linear.scale_hidden_gradient(call.head, grad_hidden, coefficients * call.plan.put(outputs.multiplier))
    return _First(inputs, loss, outputs.log_sum_exp, coefficients, grad_hidden)


def _first_columns(call: PolicyCall, wanted: Wanted) -> _First | None:
    """Also as many of grad-weight's rows as its own memory has room to sum in that pass; None where it has none."""
    groups = separable_groups(call, group_rows(call.head)) or separable_groups(call, max(call.plan.counts, default=0))
    if not groups or not wanted.weight or not serves(call.head, groups):
        return None
    source = coefficients.fixed(call) if call.traits.fixed_coefficients else coefficients.of_each_group(call)
    part = first_columns_pass(call.head, call.rows, wanted, source.of_rows, groups)
    inputs = call.inputs_with(part.log_probabilities.values)
    return _First(
        inputs,
        source.loss(inputs),
        part.log_probabilities.log_sum_exp,
        call.plan.put(part.coefficients),
        part.grad_hidden,
        part.begun,
    )
