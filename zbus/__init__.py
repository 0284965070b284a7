"""zbus: a message bus for single-controller distributed training."""
