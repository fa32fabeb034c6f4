"""TM170 to TM179: modules, optimizers and state dicts that are used in a wrong way."""
