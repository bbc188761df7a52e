"""From files to batches: sources, row formats, chat templates, label masks, the audit, packing and collation."""
