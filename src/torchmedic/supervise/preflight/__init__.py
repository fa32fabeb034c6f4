"""What would hang or freeze a training before it does: the host, the cards, the build of torch, the script."""
