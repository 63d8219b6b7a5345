"""`python -m onnxgrail` is the same program as `onnxgrail`."""

from onnxgrail.start import main

if __name__ == "__main__":
    main()
