"""Every rule, by hand, under the kind of evidence that it looks at; the specific before the general.

Rules are named as text and loaded late: rules that read live tensors import torch, which the supervising parent never
does. So mypy cannot see which evidence a listed rule takes. It sees that a family is asked about its own kind of
evidence (`engine.ask`), and `tests/unit/diagnose/test_registry.py` compares the annotation of every rule's `check` with
the family that lists the rule.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Generic

from torchmedic.diagnose.rule import E_contra, Rule
from torchmedic.records import Diagnosis

if TYPE_CHECKING:
    from torchmedic.evidence.check_up import CheckUp
    from torchmedic.evidence.exception import RaisedEvidence
    from torchmedic.evidence.leaks.evidence import LeakEvidence
    from torchmedic.evidence.loop import LoopEvidence
    from torchmedic.evidence.lost_device.evidence import LostDevice
    from torchmedic.evidence.numbers import NumbersEvidence
    from torchmedic.observe.memory.last_numbers import NoRoom
    from torchmedic.records.death import Death
    from torchmedic.records.memory import HostAlarm
    from torchmedic.records.rank_facts import JobFacts
    from torchmedic.records.ranks import Job
    from torchmedic.records.stall import Stall

_RULES = "torchmedic.diagnose.rules."


class Family(tuple[str, ...], Generic[E_contra]):
    """Rules that look at one kind of evidence, in the order in which they are asked.

    Args:
        rules: Modules below `diagnose/rules`. A module is called like its rule.
        silent: Training goes on and nothing is raised: such a finding explains no death, and a user may ignore it.
        hang: The run makes no progress.
        fallback: The diagnosis where no rule has any.
    """

    silent: bool
    hang: bool
    fallback: bool

    def __new__(cls, *rules: str, silent: bool = False, hang: bool = False, fallback: bool = False) -> Family[E_contra]:
        family = super().__new__(cls, rules)
        family.silent, family.hang, family.fallback = silent, hang, fallback
        return family


# First tier of the rules about memory that ran out: who is to blame.
EXHAUSTED: Family[RaisedEvidence] = Family(
    "memory.accidental_broadcast",
    "memory.retained_graph",
    "memory.shared_device",
    "memory.fragmented_memory",
    "memory.first_optimizer_state",
    "memory.dense_embedding_gradient",
    "memory.evaluation_with_gradients",
    "memory.collected_tensors",
    "memory.growing_batch",
    "memory.outlier_batch",
    "memory.allocator_thrash",
)

# Second tier: what only says that memory ran out, and which limit was reached.
OUT_OF_MEMORY: Family[RaisedEvidence] = Family(
    "memory.address_space_limit",
    "memory.cgroup_limit",
    "memory.host_memory_exhausted",
    "memory.does_not_fit",
)

# Rules that are not asked once one of these others has answered: its answer says more, even if it is less certain.
UNLESS: dict[str, tuple[str, ...]] = dict.fromkeys(OUT_OF_MEMORY, EXHAUSTED) | {
    "hangs.slow.long_work": ("hangs.endless_loop",),  # which is at work, too
}

# Asked in a DataLoader worker that ran out of memory: it knows who holds what, and the main process does not.
OF_WORKER: Family[RaisedEvidence] = Family(
    *EXHAUSTED,
    *OUT_OF_MEMORY,
)

# Asked in the process that raised, while its frames are alive.
RAISED: Family[RaisedEvidence] = Family(
    "process.recursion_limit",
    "memory.shared_memory_full",
    "memory.pinned_memory_refused",
    "process.disk_full",
    "process.too_many_open_files",
    *EXHAUSTED,
    *OUT_OF_MEMORY,
    "process.worker_killed",
    "devices.cuda_in_forked_process",
    "devices.cuda_not_available",
    "devices.invalid_device_ordinal",
    "devices.driver_mismatch",
    "devices.no_kernel_for_gpu",
    "devices.cuda_library_error",
    "process.unequal_samples",
    "process.missing_main_guard",
    "process.dataset_exception",
    "process.iterator_used_up",
    "autograd.inplace_on_saved_tensor",
    "autograd.loss_without_graph",
    "autograd.backward_through_freed_graph",
    "autograd.inplace_on_leaf",
    "autograd.inplace_on_forbidden_view",
    "autograd.write_to_overlapping_memory",
    "autograd.wrong_number_of_gradients",
    "autograd.wrong_gradient_shape_or_dtype",
    "autograd.missing_or_bad_backward",
    "ranks.port_taken",
    "ranks.gpu_given_to_two_ranks",
    "ranks.ranks_did_not_meet",
    "ranks.parameters_without_gradient",
    "ranks.parameter_ready_twice",
    "ranks.parameters_differ_between_ranks",
    "ranks.file_not_ready",
    "ranks.rank_outside_of_group",
    "ranks.spawn_arguments_do_not_fit",
    "ranks.collective_arguments_do_not_fit",
    "ranks.sharded_weight_used_directly",
    "ranks.job_not_joined",
    "ranks.job_joined_twice",
    "autograd.unused_in_graph",
    "autograd.checkpoint_mismatch",
    "autograd.inference_tensor_in_graph",
    "autograd.no_derivative",
    "autograd.bad_hook",
    "autograd.amp_misuse",
    "autograd.integer_requires_grad",
    "autograd.out_argument_with_gradient",
    "autograd.requires_grad_of_non_leaf",
    "autograd.wrong_gradient_assigned",
    "autograd.deepcopy_of_non_leaf",
    "autograd.wrong_initial_gradient",
    "shapes.hidden_state_mismatch",
    "devices.device_mismatch",
    "modules.uninitialised_parameters",
    "shapes.batch_size_mismatch",
    "shapes.loss_shape_mismatch",
    "shapes.wrong_target_dtype",
    "devices.label_out_of_range",
    "devices.index_out_of_range",
    "devices.tensor_out_of_reach_of_numpy",
    "devices.not_allowed_in_capture",
    "devices.value_out_of_domain",
    "modules.module_not_initialised",
    "modules.missing_module_attribute",
    "modules.missing_forward",
    "modules.wrong_forward_arguments",
    "modules.state_dict_mismatch",
    "modules.non_leaf_or_empty_optimizer",
    "modules.wrong_kind_of_attribute",
    "modules.unpickling_refused",
    "modules.unpicklable_object",
    "modules.metric_not_logged",
    "modules.wrong_step_call",
    "shapes.indivisible_sizes",
    "shapes.fractional_size",
    "shapes.unusable_sequence_lengths",
    "shapes.wrong_unpacking",
    "shapes.single_value_normalised",
    "shapes.not_a_tensor",
    "numbers.mean_of_nothing",
    "autograd.unfit_for_transform",
    "autograd.unfit_for_full_graph",
    "autograd.backward_on_non_scalar",
    "shapes.ambiguous_truth_value",
    "shapes.tensor_to_numpy_with_gradient",
    "shapes.several_elements_as_scalar",
    "shapes.dtype_mismatch",
    "shapes.dimension_out_of_range",
    "shapes.matmul_shape_mismatch",
    "shapes.channel_mismatch",
    "shapes.kernel_larger_than_input",
    "shapes.concat_size_mismatch",
    "shapes.impossible_view",
    "shapes.broadcast_mismatch",
)

# Asked of the exception that a step raised on the CPU, when it was run again because its device had died.
SHADOWED: Family[RaisedEvidence] = Family(
    "devices.label_out_of_range",
    "devices.index_out_of_range",
    "devices.value_out_of_domain",
)

# Asked of a device that died, where running the step on the CPU did not show why.
LOST: Family[LostDevice] = Family(
    "devices.device_side_assert",
    "devices.illegal_memory_access",
    "devices.gpu_hardware_fault",
)

# Each of these runs the last steps again, with one thing changed.
COUNTERFACTUAL: Family[NumbersEvidence] = Family(
    "numbers.loss_maximised",
    "numbers.unstable_optimizer_setting",
    "numbers.poisonous_batch",
    "numbers.loss_summed_not_averaged",
    "numbers.unscaled_data",
    "numbers.loss_term_too_heavy",
    "numbers.learning_rate_too_high",
)

# What made training run away: before the operation that overflowed at last.
RUNAWAY: Family[NumbersEvidence] = Family(
    "numbers.inner_step_too_large",
    "numbers.self_amplifying_target",
    "numbers.exploding_recurrence",
    "numbers.exploding_depth",
    *COUNTERFACTUAL,
)

# Asked of a loss that is far too large, where the last steps cannot be run again.
DIVERGED: Family[NumbersEvidence] = Family(
    "numbers.inner_step_too_large",
    "numbers.self_amplifying_target",
    "numbers.exploding_recurrence",
    "numbers.exploding_depth",
    "numbers.unstable_optimizer_setting",
    "numbers.diverging_training",
)

# Asked of such a loss where the last steps were run again, and nothing that was changed turned its course.
DIVERGED_SOMEHOW: Family[NumbersEvidence] = Family("numbers.diverging_training")

# Asked of a loss that is still where it was at first.
STANDING_STILL: Family[NumbersEvidence] = Family("numbers.unscaled_data")

# Asked of a loss that was above zero at first, and is below it.
SUNK: Family[NumbersEvidence] = Family("numbers.loss_maximised")

# Asked in the process in which NaN or infinity is about to reach the weights.
NUMBERS: Family[NumbersEvidence] = Family(
    *RUNAWAY,
    "numbers.nonfinite_optimizer_update",
    "numbers.damaged_weights",
    "numbers.nonfinite_data",
    "numbers.diverging_training",
    "numbers.nan_hidden_by_where",
    "numbers.fully_masked_row",
    "numbers.mean_of_nothing",
    "numbers.statistics_of_one_element",
    "numbers.infinite_loss_by_definition",
    "numbers.epsilon_lost_to_rounding",
    "numbers.low_precision_overflow",
    "numbers.division_by_zero",
    "numbers.log_of_zero_or_negative",
    "numbers.argument_outside_domain",
    "numbers.exp_overflow",
    "numbers.infinity_minus_infinity",
    "numbers.gradient_at_singularity",
    "numbers.collapsed_loss_scale",
    "ranks.nonfinite_from_exchange",
    "numbers.nonfinite_operation",
)

# The same, where the last steps cannot be run again.
NUMBERS_OF_STEP: Family[NumbersEvidence] = Family(*(rule for rule in NUMBERS if rule not in COUNTERFACTUAL))

# Asked of a loop that surely contains a mistake, while it goes on.
SILENT: Family[LoopEvidence] = Family(
    "loop.gradients_never_cleared",
    "loop.gradients_cleared_inside_accumulation",
    "loop.loss_not_divided",
    "loop.gradients_cleared_before_step",
    "loop.step_without_backward",
    "loop.clip_before_unscale",
    "loop.unregistered_layers",
    "loop.optimizer_of_replaced_parameters",
    "ranks.gradients_kept_back",
    "loop.frozen_optimizer",
    "loop.zero_learning_rate",
    "loop.schedule_before_update",
    "loop.schedule_per_batch",
    "loop.training_in_eval_mode",
    "loop.validation_in_train_mode",
    "loop.same_batch_every_step",
    "loop.classes_in_order",
    "loop.same_randomness_in_workers",
    "loop.empty_cache_every_step",
    "loop.needless_wait",
    "loop.growing_graph",
    "loop.leftover_micro_batches",
    "loop.parameters_without_optimizer",
    "loop.leaf_made_anew",
    "loop.rate_decayed_to_nothing",
    "loop.updates_lost_in_rounding",
    "loop.optimizer_never_steps",
    "loop.vanishing_gradients",
    "loop.updates_undone",
    "loop.identical_inputs",
    "loop.labels_of_other_items",
    "loop.result_thrown_away",
    "loop.loop_without_batches",
    "loop.nothing_loaded",
    "loop.state_not_copied",
    "loop.random_numbers_repeat",
    "loop.one_layer_for_several",
    "loop.gradients_of_another_loss",
    "loop.pictures_cut_apart",
    "loop.optimizer_made_anew",
    "loop.dropout_in_evaluation",
    silent=True,
)

# Asked of the first steps, each rule for itself: what their graphs show.
CHECKUP: Family[CheckUp] = Family(
    "checkup.loss_without_way_back",
    "checkup.broadcast_in_loss",
    "checkup.activation_applied_twice",
    "checkup.target_out_of_reach",
    "checkup.all_gradients_zero",
    "checkup.dead_relu_layer",
    "checkup.parameters_cut_off",
    "checkup.unused_layer",
    "checkup.thawed_without_gradient",
    "checkup.promoted_to_double",
    "checkup.first_loss_too_high",
    "checkup.backward_inside_autocast",
    "checkup.softmax_over_one_value",
    "checkup.normalised_over_wrong_dimension",
    "checkup.loss_term_without_graph",
    "checkup.dimensions_mixed_up",
    "checkup.gradient_always_zero",
    "checkup.policy_pulled_wrong_way",
    "checkup.target_in_sight",
    "checkup.labels_shifted_twice",
    "checkup.padding_read_as_last_step",
    "checkup.padding_mask_inverted",
    "checkup.padding_in_loss",
    "checkup.identical_units",
    "checkup.outdated_amp_names",
    silent=True,
)

# Asked of what grows while training goes on.
GROWING: Family[LeakEvidence] = Family(
    "memory.graphs_kept",
    "memory.graph_carried_on",
    "memory.growing_holder",
    "memory.gradient_cycles",
    "memory.hooks_pile_up",
    silent=True,
)

# Asked in the parent, of memory of the host that is about to end.
HOST: Family[HostAlarm] = Family("memory.host_memory_running_out", silent=True)

# Asked in the parent, of a process that had no memory left to look at itself.
OUT_OF_ROOM: Family[NoRoom] = Family(
    "memory.address_space_limit",
)

# Asked in the parent, of a process that is gone.
DEATHS: Family[Death] = Family(
    "process.segmentation_fault",
    "process.abort",
    "memory.shared_memory_full",
    "process.bus_error",
    "process.illegal_instruction",
    "process.arithmetic_fault",
    "memory.cgroup_limit",
    "process.killed_for_memory",
    "process.killed",
)

# Asked of a run that makes no progress.
STALLED: Family[Stall] = Family(
    "hangs.stopped_process",
    "hangs.gil_held_by_native_code",
    "hangs.lock_inherited_through_fork",
    "hangs.thread_deadlock",
    "hangs.openmp_after_fork",
    "hangs.openmp_team_too_small",
    "hangs.empty_loader_cycled",
    "hangs.wait_inside_backward",
    "hangs.waiting_for_input",
    "hangs.queue_not_drained",
    "hangs.output_not_drained",
    "hangs.file_lock_held",
    "hangs.dead_producer_thread",
    "hangs.nobody_left_to_signal",
    "hangs.thread_outlives_script",
    "hangs.endless_loop",
    "hangs.worker_stuck",
    "hangs.gpu_lost",
    "hangs.waits_for_collective",
    "hangs.gpu_kernel_never_ends",
    "hangs.storage_or_network_wait",
    "hangs.waits_for_child_process",
    "hangs.swap_thrash",
    "hangs.stalled_by_allocator",
    "hangs.slow.cpu_throttled",
    "hangs.slow.autotuning",
    "hangs.slow.ptx_compiled_by_driver",
    "hangs.slow.compiling",
    "hangs.slow.saving_checkpoint",
    "hangs.slow.slow_data",
    "hangs.slow.long_kernel",
    "hangs.slow.sleeping_on_purpose",
    "hangs.slow.long_work",
    "hangs.standstill_not_explained",
    hang=True,
)

# Asked in the parent, of a job of several ranks that has failed or stands still.
RANKS: Family[Job] = Family(
    "ranks.collectives_of_two_threads",
    "ranks.collective_after_exception",
    "ranks.collective_contents_differ",
    "ranks.collectives_in_different_order",
    "ranks.rank_left_the_loop",
    "ranks.collective_on_some_ranks",
    "ranks.message_without_partner",
    "ranks.rank_came_too_late",
)

# Asked in the parent, of a job of several ranks that goes on or has ended well. Each rule may speak.
COMPARED: Family[JobFacts] = Family(
    "ranks.same_data_on_all_ranks",
    "ranks.same_order_in_every_epoch",
    "ranks.parameters_in_different_order",
    "ranks.exchange_not_awaited",
    "ranks.parts_in_one_tensor",
    "ranks.weights_drift_apart",
    "ranks.exchange_in_every_micro_batch",
    "ranks.device_shared_by_ranks",
    "ranks.rank_is_slow",
    silent=True,
)

# Asked by nobody: what remains when all others are silent.
LAST: Family[Any] = Family("cause_not_known", fallback=True)

_FAMILIES: tuple[Family[Any], ...] = (
    RAISED,
    LOST,
    NUMBERS,
    SILENT,
    CHECKUP,
    GROWING,
    HOST,
    DEATHS,
    STALLED,
    RANKS,
    COMPARED,
    LAST,
)
ALL: tuple[str, ...] = tuple(dict.fromkeys(rule for family in _FAMILIES for rule in family))


def load(rule: str) -> Rule[Any]:
    """Import a rule. Only the process of the user may load all of them: most rules import torch."""
    found = __import__(_RULES + rule, fromlist=["check"]).check  # as an import statement: see inject/own_imports.py
    assert isinstance(found, Rule)
    return found


def is_silent(diagnosis: Diagnosis) -> bool:
    """Whether the diagnosis is about a mistake that raises nothing."""
    return any(family.silent for family in _families(diagnosis.name))


def is_hang(diagnosis: Diagnosis) -> bool:
    """Whether the diagnosis is about a run that makes no progress."""
    return any(family.hang for family in _families(diagnosis.name))


def is_fallback(diagnosis: Diagnosis) -> bool:
    """Whether the diagnosis says that no rule has an explanation."""
    return any(family.fallback for family in _families(diagnosis.name))


@functools.cache
def _families(name: str) -> tuple[Family[Any], ...]:
    """The families that list the rule of this name. No rule is loaded: a module is called like its rule."""
    module = name.replace("-", "_")
    return tuple(family for family in _FAMILIES if any(rule.split(".")[-1] == module for rule in family))
