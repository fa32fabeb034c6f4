"""The parent: starts the script, passes signals on, and is still there when the script is not. Never imports torch."""
