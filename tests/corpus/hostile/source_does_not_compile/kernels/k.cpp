extern "C" void relu( {
