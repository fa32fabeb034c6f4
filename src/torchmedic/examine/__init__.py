"""The conductor in the failing process: incident -> evidence -> diagnosis -> recording -> run folder.

`conductor.py` is what the agent calls. Beside it there is one module per kind of incident, each read from top to
bottom, and `publication.py`, which writes to the run folder.
"""
