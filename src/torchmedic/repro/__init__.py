"""A standalone script of the operation that failed: recorded when it fails, shrunk and checked when it is asked for."""
