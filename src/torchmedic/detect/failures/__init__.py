"""An exception, a text or a wait status -> an incident of a kind."""
