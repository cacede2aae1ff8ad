"""A package, since engines install one of this name: ours is to be found first."""
