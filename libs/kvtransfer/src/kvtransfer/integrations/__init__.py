"""Connectors of engines that have a seam of their own. Each imports its engine; nothing else imports them."""
