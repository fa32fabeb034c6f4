"""Every storage once, under one heading, with the name that holds it."""
