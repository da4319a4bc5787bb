"""One instance over several processes: who holds what, and how the ranks are told what to compute. No torch here."""
