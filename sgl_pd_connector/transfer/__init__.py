"""The data plane: engine, side channel, sender, receiver, manager."""
