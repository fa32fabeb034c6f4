"""Pictures were given another shape where their dimensions should change places, so their pixels are cut apart.

What: the data holds pictures as (height, width, channels), and the batch has them as (channels, height, width), but the
values are still in the order in which the data has them. Each channel of the batch is a third of the picture, with the
colours of all pixels side by side.

Why: `view` and `reshape` give a tensor or an array another shape, and leave the values in their order. The shapes fit,
so no error is raised, and a part of the pattern survives: the loss falls, though not as far as it could.

Cure: exchange the dimensions: `permute(2, 0, 1)` for a tensor, `transpose(2, 0, 1)` for an array of NumPy.
"""

from __future__ import annotations

from torchmedic.detect.loop.incident import PicturesCutApart
from torchmedic.diagnose.rule import Draft, loop_rule
from torchmedic.evidence.loop import LoopEvidence


@loop_rule("TM665", "pictures-cut-apart", PicturesCutApart)
def check(evidence: LoopEvidence, incident: PicturesCutApart) -> Draft | None:
    channels, height, width = incident.shape
    draft = check.draft(evidence, "proven")
    draft.message = "the pictures are cut apart: they got another shape, and their dimensions did not change places"
    draft.cause = (
        f"`{incident.name}` holds {height} x {width} x {channels} values per picture, and the batch has them as "
        f"{channels} x {height} x {width} in the same order"
    )
    draft.at(evidence.at("cause", incident.cause, "does not move any value", incident.call))
    if incident.data != incident.cause:
        draft.at(evidence.at("surfaced", incident.data, "the batches come from here"))
    draft.because(f"{incident.compared} pictures of a batch were compared with `{incident.name}`, value by value")
    return draft.help("write `permute` or `transpose` instead", safety="changes-training").rated("warning")
