"""Facts -> Incident: that something is wrong, and of which kind. No cause is named here."""
