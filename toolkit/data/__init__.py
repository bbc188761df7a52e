"""From files to batches: sources, row shapes, chat templates, label masks, the audit, packing and collation."""
