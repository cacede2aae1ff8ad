"""Everything that crosses a process boundary, as plain data: no sockets, no threads, no JAX arrays."""
