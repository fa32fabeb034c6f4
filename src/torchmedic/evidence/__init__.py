"""What rules look at: one class per kind of incident."""
