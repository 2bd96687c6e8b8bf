"""Training of draft heads: answers of the target, its features on disk, trainers of each kind of head."""
