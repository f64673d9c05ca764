"""What keeps neighbours, strangers and hostile files out."""
