"""The two roles every engine needs: the scheduler role decides, the rank role owns memory, agent and writes."""
