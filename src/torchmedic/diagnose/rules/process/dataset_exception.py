"""The dataset, its transform or the collate function raised an exception.

What: reading an item or making a batch of items failed in user code, in a DataLoader worker or in the main process. The
traceback of the main process ends in the training loop; the line to check is in the dataset.

Why: one damaged or unusual item (a missing file or key, an empty text, another number of channels), an index beyond the
end, or a mistake in `__getitem__`, in a transform or in `collate_fn`.

Cure: call `dataset[index]` with the reported index: the call fails in the same way, without a DataLoader around it.
"""

from __future__ import annotations

import re
from typing import Any

from torch.utils.data import Subset

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.format import listed
from torchmedic.diagnose.words.tensors import count
from torchmedic.evidence.data_loading import Loading, loading_of
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.evidence.whole_number_makers import line_of_index
from torchmedic.records import Diagnosis, Location, Role
from torchmedic.source.objects.parts import is_users

_NONE = re.compile(r"\bNoneType\b")


@rule("TM820", "dataset-exception")
def check(evidence: RaisedEvidence) -> Draft | None:
    loading = loading_of(evidence)
    if loading is None:
        return None
    failure = loading.failure
    known = _nothing(evidence, loading) or _beyond(evidence, loading)
    if known is not None:
        return known
    item = f"item {failure.index}" if failure.index is not None else ""
    what = {"sample": "the dataset", "collate": "the collate function", "other": "a DataLoader worker"}[failure.stage]
    if failure.stage == "other" and failure.worker is None:
        what = "pinning a batch"
    first_line = failure.message.strip().splitlines()[0][:200] if failure.message.strip() else "no message"
    draft = check.draft(evidence, "proven")
    draft.message = f"{what} raised {failure.exception}" + (f" for {item}" if item else "")
    draft.cause = f"{failure.exception}: {first_line}"
    draft.at(*_places(loading, item))
    draft.because(f"{loading.process}" + (f", {_where(loading)}" if _where(loading) else ""))
    if failure.batch_indices:
        draft.because(f"the batch: dataset items {listed([str(each) for each in failure.batch_indices], 8)}")
    if failure.sample:
        draft.because(f"at that line: {failure.sample}")
    if failure.stage == "collate" and failure.sample_shapes:
        draft.because(f"the samples of the batch: {listed(list(dict.fromkeys(failure.sample_shapes)), 4)}")
    draft.because(_explained(evidence))
    if isinstance(failure.index, int | str):
        alone = f"`dataset[{failure.index}]`"
        draft.help(f"look at item {failure.index}, and at what this line does with it; {alone} alone fails too")
    return draft


def _nothing(evidence: RaisedEvidence, loading: Loading) -> Draft | None:
    """An item that is None or has a part that is, which torch's own collate function refuses with whatever words."""
    failure = loading.failure
    empty = [position for position, words in enumerate(failure.sample_shapes) if _NONE.search(words)]
    if failure.stage != "collate" or loading.user_frame is not None or not empty:
        return None
    at = failure.batch_indices[empty[0]] if empty[0] < len(failure.batch_indices) else None
    item = f"item {at}" if at is not None else f"sample {empty[0]} of the batch"
    whole = failure.sample_shapes[empty[0]] == "NoneType"
    draft = check.draft(evidence, "proven")
    draft.message = f"the dataset returned None for {item}" if whole else f"a part of {item} of the dataset is None"
    of_all = f"{len(empty)} of {len(failure.sample_shapes)} samples"
    draft.cause = f"{of_all} {'are' if whole else 'have a part that is'} None"
    draft.at(loading.at_samples("cause", f"None for {item}", nothing=whole) or loading.at_loader("cause", item))
    draft.at(loading.at_loop("surfaced", "the batch was asked for here")).because(loading.process)
    draft.because("" if whole else f"the sample is {failure.sample_shapes[empty[0]]}")
    return draft.help("return a sample for every index, or leave such items out of the dataset before training")


def _beyond(evidence: RaisedEvidence, loading: Loading) -> Draft | None:
    """An index that the dataset does not have: the sampler was made for another one."""
    failure = loading.failure
    dataset: Any = loading.dataset
    if failure.exception not in ("IndexError", "KeyError") or failure.stage != "sample":
        return None
    try:
        size = len(dataset)
        # The indices of a `Subset` are told as those of the dataset behind it, as far as it has them.
        told = {int(index) for index in dataset.indices} if isinstance(dataset, Subset) else set()
    except Exception:  # no length, or the user's own method fails
        return None
    beyond = [
        index for index in failure.batch_indices if isinstance(index, int) and index >= size and index not in told
    ]
    if not beyond or (isinstance(failure.index, int) and failure.index < size):
        return None
    batches = getattr(loading.iterator, "_index_sampler", None)
    sampler = getattr(batches, "sampler", batches)
    name = type(sampler).__name__
    draft = check.draft(evidence, "proven")
    draft.message = f"`{name}` asks for item {beyond[0]} of a dataset with {count(size, 'item')}"
    draft.cause = f"of the {len(failure.batch_indices)} indices of this batch, {len(beyond)} or more are beyond its end"
    label = f"index {beyond[0]} of {size} comes from here"
    draft.at(line_of_index(evidence.frames, batches if is_users(type(batches)) else sampler, size, label))
    role: Role = "origin" if draft.has_place else "cause"
    draft.at(loading.at_loader(role, f"the sampler counts more than {size} items"))
    draft.at(loading.at_loop("surfaced" if draft.has_place else "cause", "the batch was asked for here"))
    return draft.help("make the sampler for this very dataset: indices of a `Subset` run from 0 to its own length")


def _places(loading: Loading, item: str) -> list[Location | None]:
    failure = loading.failure
    label = f"{failure.exception}" + (f", {item}" if item else "")
    places = [loading.at_user_frame("cause", label)]
    if places[0] is None and failure.stage == "collate":
        # Torch's own collate function could not make a batch of what the dataset hands out.
        places = [loading.at_samples("cause", "these samples cannot be made into a batch")]
    if places[0] is None:
        places = [loading.at_loader("cause", f"{label}, in a dataset that is not the script's own")]
    if places[0] is None:
        return [loading.at_loop("cause", label)]
    return [*places, loading.at_loop("surfaced", "the batch was asked for here")]


def _where(loading: Loading) -> str:
    frame = loading.user_frame
    return f"in `{frame.function}`" if frame is not None else ""


def _explained(evidence: RaisedEvidence) -> str:
    """The answer of the rules about operations, if the frames are still alive."""
    if evidence.incident.worker is not None:
        return ""
    from torchmedic.diagnose import registry

    for name in registry.RAISED:
        if not name.startswith(("shapes.", "modules.", "devices.")):
            continue
        try:
            answer = registry.load(name).check(evidence)
            found = answer.done() if isinstance(answer, Draft) else answer
        except Exception:  # the rule is asked out of turn; its own faults are not the point here
            continue
        if isinstance(found, Diagnosis) and found.grade == "proven":
            return f"{found.code} explains it: {found.message}"
    return ""
