"""Plans: which mesh axis each logical axis is cut along. Plain numbers; no framework is imported."""
