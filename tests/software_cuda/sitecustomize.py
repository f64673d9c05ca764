"""On PYTHONPATH: every Python process gets the software devices, ranks that a job starts too."""

import software_device

software_device.install()
