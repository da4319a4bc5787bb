"""How the bytes of a matched pair of views become runs: one module per way of cutting."""
