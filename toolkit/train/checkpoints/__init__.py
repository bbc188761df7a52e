"""What a training writes to go on from, or to publish: in which files, when it counts, and how it is read again."""
