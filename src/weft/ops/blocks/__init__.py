"""Along cut dims by a few numbers of every block: scans, moments, norms, extrema, means."""
