"""Eight CPU devices for the tests on meshes. Runs when tests are collected, before JAX looks for devices."""

from __future__ import annotations

import jax

jax.config.update("jax_num_cpu_devices", 8)
