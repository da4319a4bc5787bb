"""Direct or bounced: what either way would take on a path, and who decides.

model      predictions from a handful of measured numbers (pure)
policies   the decision: by predictions, or by one of the fixed gates that other systems use (pure)
book       the numbers of every path: measured, refined by what transfers took, kept on disk
"""
