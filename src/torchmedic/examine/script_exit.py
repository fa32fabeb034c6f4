"""A script that leaves by `sys.exit`, perhaps because it saw a number that is not finite."""

from __future__ import annotations

from types import FrameType

from torchmedic.evidence.number_exception import EchoEvidence, asks_about_number
from torchmedic.examine.nonfinite import older_origin
from torchmedic.examine.publication import publish_finding
from torchmedic.observe.context import ProcessContext
from torchmedic.observe.stages import Finding
from torchmedic.source.live_frames import Frame
from torchmedic.source.user_code import user_frame


def explain_exit(frame: FrameType, agent: ProcessContext) -> None:
    """Find the origin of the number that made the script give up, if that is why it leaves."""
    user = user_frame(frame)
    if user is None or not agent.finite.on or not asks_about_number(Frame(user, user.f_lasti, user.f_lineno)):
        return
    diagnosis = older_origin(EchoEvidence.of_exit(frame, agent))
    if diagnosis is not None:
        agent.finite.on = False
        publish_finding(Finding(diagnosis), agent)
