"""For all Python tests."""

import signal

# A shell that starts the tests in the background has SIGINT ignored: then nothing here, nor a process that
# a test starts, would notice Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
