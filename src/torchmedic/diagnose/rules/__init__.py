"""One rule, one file. The families follow the hundreds of the codes."""
