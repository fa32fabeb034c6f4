"""What torch says in a message of its own, where nothing better is to be had: patterns and our words for them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torchmedic.evidence.exception import RaisedEvidence


def in_our_words(evidence: RaisedEvidence, messages: Iterable[tuple[str, str]]) -> str | None:
    """The words of the first pattern that the message has, with what it names."""
    for pattern, words in messages:
        if (found := re.search(pattern, evidence.message, re.M)) is not None:
            return words.format(*found.groups())
    return None
