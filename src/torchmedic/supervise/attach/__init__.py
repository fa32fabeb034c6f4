"""A verdict on running processes that torchmedic did not start. They are not stopped or changed."""
