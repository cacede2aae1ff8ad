"""The registry where prefill and decode instances find each other."""
