"""torchmedic inside other tools: the Python API, notebooks, pytest, training frameworks and experiment trackers.

Each module is the wiring of one tool and detects nothing itself. A module is imported only by the tool that it is for.
"""
