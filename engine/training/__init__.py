"""Training of draft heads: answers of the target, its features on disk, and the trainers of each kind of head."""
