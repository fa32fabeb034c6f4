"""TM150 to TM169 and TM177: shapes and dtypes that do not fit."""
