core:
	.venv/bin/cmake -S . -B $(or $(BUILD),build/dev) -G Ninja -DMEMSERVE_INPLACE=ON -DPython_EXECUTABLE=$(CURDIR)/.venv/bin/python -DCMAKE_MAKE_PROGRAM=$(CURDIR)/.venv/bin/ninja > /dev/null
	.venv/bin/cmake --build $(or $(BUILD),build/dev) $(if $(TARGET),--target $(TARGET))
