"""A standalone script of the operation that failed: recorded at the failure, shrunk and checked on demand."""
