"""`python -m onnxgrail` is the same program as `onnxgrail`."""

from onnxgrail.cli import main

if __name__ == "__main__":
    main(prog_name="onnxgrail")
