"""Answers from live frames and syntax: the value of an expression, the failing call, where a value was made."""
