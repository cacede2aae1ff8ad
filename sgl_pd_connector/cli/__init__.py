"""The command line: sgl-pd."""
