"""A verdict on processes that are hung now and were not started by torchmedic. Nothing is done to them."""
