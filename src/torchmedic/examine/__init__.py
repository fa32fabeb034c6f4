"""The conductor in the failing process: incident -> evidence -> diagnosis -> run folder."""
