"""What plug-in writers test their parts with: one conformance class per interface."""
